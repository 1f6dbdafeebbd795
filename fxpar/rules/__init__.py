"""What every operation can do on one mesh axis, from one line of text each.

In: a :class:`fxpar.graph.Graph` and one of its nodes. Out: its :class:`Rule`, its strategies, the links of its
strided cuts. ``localise`` (what a rank runs) is in :mod:`fxpar.rules.localise`, ``flops`` in :mod:`fxpar.rules.work`.
Importing this package registers the rules of all its modules.
"""

from fxpar.rules import attention, conv, dense, embed, factory, index, norm, pointwise, reduce, shape
from fxpar.rules.generate import Link, dim_hint_to_factor, factor_hint_to_dim, hint_links, strategies
from fxpar.rules.notation import Place, Rule
from fxpar.rules.registry import LOCALISERS, RULES, register, rule_for
from fxpar.rules.strategy import Strategy

__all__ = [
    "LOCALISERS",
    "RULES",
    "Link",
    "Place",
    "Rule",
    "Strategy",
    "dim_hint_to_factor",
    "factor_hint_to_dim",
    "hint_links",
    "register",
    "rule_for",
    "strategies",
]

_REGISTERING = (attention, conv, dense, embed, factory, index, norm, pointwise, reduce, shape)
