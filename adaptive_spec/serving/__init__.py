"""HTTP: the OpenAI-compatible routes, the control plane, metrics and one page.

Called by ``adaptive-spec serve``.  Knows a service by the shape in ports.py and never touches a model or a tensor.
"""
