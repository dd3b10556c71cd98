"""The Jupyter app: JupyterLab on a node, with headrace in its Python, behind the portal and a password."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cluster.ondemand.form import form_yml, manifest_yml, path_sh, submit_yml

if TYPE_CHECKING:
    from headrace.cluster.site_facts import SiteFacts

__all__ = ["jupyter_files"]

_QUESTIONS = {
    "folder": {
        "label": "Folder",
        "widget": "text_field",
        "value": "~",
        "required": True,
        "help": "Where JupyterLab begins.",
    },
}

# The password reaches Jupyter through a file that its owner alone can read: what stands on a command line,
# all users of the node see.
_BEFORE = """export port=$(find_port ${host})
export password=$(create_passwd 32)
(
  umask 077
  salt=$(create_passwd 16)
  digest=$(printf '%s' "${password}${salt}" | sha256sum | cut -d ' ' -f 1)
  cat > "${PWD}/config.py" <<PY
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.port = ${port}
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.base_url = "/node/${host}/${port}/"
c.PasswordIdentityProvider.hashed_password = "sha256:${salt}:${digest}"
c.ServerApp.allow_origin = "*"
PY
)
"""

_SCRIPT = """#!/usr/bin/env bash
%(path)s
config="${PWD}/config.py"
cd -- <%%= File.expand_path(context.folder.to_s.strip).shellescape %%> || exit 1
exec jupyter lab --config="${config}"
"""

_VIEW = """<form action="/node/<%= host %>/<%= port %>/login" method="post" target="_blank">
  <input type="hidden" name="password" value="<%= password %>">
  <button class="btn btn-primary" type="submit">Open JupyterLab</button>
</form>
"""


def jupyter_files(facts: SiteFacts) -> dict[str, str]:
    """Text of each file of the app."""
    script = '<%- require "shellwords" -%>\n' + _SCRIPT % {"path": path_sh(facts)}
    return {
        "manifest.yml": manifest_yml("Jupyter (headrace)", "JupyterLab on a node of the cluster."),
        "form.yml": form_yml(facts, _QUESTIONS),
        "submit.yml.erb": submit_yml(facts, "headrace-jupyter", []),
        "template/before.sh.erb": _BEFORE,
        "template/script.sh.erb": script,
        "view.html.erb": _VIEW,
    }
