"""nn.Module + example inputs -> :class:`~fxpar.graph.Program`, with repeated modules recorded once.

Operations are seen before autograd, on fake tensors, while the model's own Python runs. :mod:`~fxpar.capture.recorder`
is the border to torch; :mod:`~fxpar.capture.session` turns what it sees into nodes; :mod:`~fxpar.capture.functional`
and :mod:`~fxpar.capture.writes` take in-place operations out; :mod:`~fxpar.capture.structure` and
:mod:`~fxpar.capture.units` fold; :mod:`~fxpar.capture.program` puts it together; :mod:`~fxpar.capture.evaluate`
runs the result as it stands.
"""

from fxpar.capture.program import LOSS_ARGS, Captured, capture

__all__ = ["LOSS_ARGS", "Captured", "capture"]
