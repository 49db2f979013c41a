"""Run by Python at start: declares the torchvision operators that its CPU wheel fails to load.

torchvision registers fake kernels for `nms` and `qnms` at import and torch refuses a fake for an operator without a
schema. SGLang imports torchvision for image models only; nothing here calls the operators.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the schemas right before torchvision is imported, so that no other process pays for importing torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch.library is untyped
            for name in ("nms", "qnms"):
                schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                library.define(schema)  # type: ignore[no-untyped-call]  # see above
            self.library = library  # a library's schemas go away with it
            _KEEP.append(self)
        return None


_KEEP: list[_BeforeTorchvision] = []
sys.meta_path.insert(0, _BeforeTorchvision())
