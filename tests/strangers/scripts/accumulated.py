"""Gradients of three batches together, clipped, in bf16; two validations an epoch."""

from typing import Any

from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(40), 4, shuffle=True)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    limits = {"limit_train_batches": 8, "limit_val_batches": 2, "val_check_interval": 0.5}
    trainer(pruning, **options, **limits).fit(Module(), loader, DataLoader(Points(16), 4))
    return pruning.value
