"""The state of modules, optimizers, metrics and other objects that a training changes."""
