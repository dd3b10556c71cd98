"""Web: live pages of a cluster: which GPUs wait for data and why, who starves, what weighs on file systems.

Start with `views` (what is shown, as plain values), `watching` (a real cluster, traced runs) and `demo` (a
recorded cluster), `live` (how it reaches browsers) and `app` (what may be asked; `access` says by whom).
`static` holds the pages' own scripts and style: nothing comes from another machine. It needs
`pip install 'headrace[web]'`.
"""
