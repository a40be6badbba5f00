"""Training backends: `base` is the interface, one module per implementation, chosen by `spec.trainer.backend`."""
