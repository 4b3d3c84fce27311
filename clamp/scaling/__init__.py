"""Loss scales, one scaled backward pass, and the guard over ``optimizer.step()``."""
