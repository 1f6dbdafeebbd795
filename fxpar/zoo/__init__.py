"""Published models by name, with the inputs of one training step, and user functions that build one.

In: a name such as ``"llama3-8b"``, or ``"package.module:function"``. Out: :class:`ZooModel`.
"""

from fxpar.zoo.loading import load
from fxpar.zoo.models import NAMES, ZooModel, build

__all__ = ["NAMES", "ZooModel", "build", "load"]
