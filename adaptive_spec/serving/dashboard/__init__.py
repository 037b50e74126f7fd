"""The dashboard: pages rendered here, without scripts and with nothing loaded from elsewhere.

``pages`` has the routes that show, ``actions`` those that change something, ``charts`` draws SVG, ``templates`` says
how it looks.  Everything shown comes from ``views``, as for the control routes.
"""
