"""Web: live pages of a cluster: which GPUs wait for data and why, who starves, what weighs on file systems.

Start with `picture` (what is shown, as plain values), `source` (who gives it: `watching` looks at a real
cluster, `demo` plays a recorded one), `live` (how it reaches browsers) and `app` (what may be asked, and
by whom). `static` holds the pages' own scripts and style: nothing comes from another machine. It needs
`pip install 'headrace[web]'`.
"""
