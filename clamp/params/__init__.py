"""State of parameters: values derived from it, fp32 masters, and the marks of its gradients."""
