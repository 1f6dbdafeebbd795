"""How a rewritten graph calls a block: through whatever its caller passes in, never through a reference it holds.

So a GraphModule belongs to no module object, and one can serve every instance of a block and every copy of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_block(caller: Callable[..., Any], name: str, module: str, *tensors: Any) -> Any:
    """The flat outputs of block graph ``name`` for the module at path ``module``, from flat local ``tensors``."""
    return caller(name, module, *tensors)
