"""The controller: hands policies to planes as leases.

Start with `arbiter` (what it knows and decides; pure but for numpy), `database` (what survives it)
and `app` (what may be asked, and how it is run). It needs `pip install 'headrace[web]'`.
"""
