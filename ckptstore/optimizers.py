"""What an optimizer's state is loaded into: its own tensors where it has them, else places like its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .leaves import is_dtensor, torch_dtype


class Place:
    """A place in an optimizer's state that does not exist yet."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def make(self, dtype: str, shape: Sequence[int]) -> torch.Tensor | None:
        """A new tensor sharded as the parameter is, if it is sharded and has this shape; else ``None``: any will do."""
        kind = torch_dtype(dtype)
        if kind is None or not is_dtensor(self._parameter) or tuple(self._parameter.shape) != tuple(shape):
            return None
        return torch.zeros_like(self._parameter, dtype=kind, requires_grad=False)


class _Places(dict[Any, Any]):
    """One parameter's state, in which every key has a place."""

    def __init__(self, parameter: torch.Tensor, known: dict[Any, Any]) -> None:
        super().__init__(known)
        self._parameter = parameter

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else Place(self._parameter)


def optimizer_template(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as something to fill. Changes nothing, and makes no state (a fake step would)."""
    state = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {"state": {i: _Places(p, state.get(i, {})) for i, p in enumerate(parameters)}}
