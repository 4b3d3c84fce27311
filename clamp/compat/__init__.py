"""The faces of other AMP systems: their names and argument forms, over clamp's one machinery."""
