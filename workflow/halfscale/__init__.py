"""halfscale: which loss-scaling settings should this model train with in fp16?

The package holds what the workflow's rules run. Importing it imports neither torch nor pandas;
``from halfscale.scaling import ManualGradScaler`` gives the hand-written scaler alone.
"""

__version__ = "0.1.0"
