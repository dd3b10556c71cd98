"""The app that trains: it runs a project's batch script, and its page shows where the log is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cluster.ondemand.form import form_yml, manifest_yml, path_sh, submit_yml

if TYPE_CHECKING:
    from headrace.cluster.site_facts import SiteFacts

__all__ = ["train_files"]

_QUESTIONS = {
    "project": {
        "label": "Project",
        "widget": "text_field",
        "required": True,
        "help": "The folder that `headrace init NAME` made, or any with a batch script.",
    },
    "batch_script": {"label": "Batch script", "widget": "text_field", "value": "job.sh", "required": True},
    "script_arguments": {
        "label": "Arguments",
        "widget": "text_field",
        "value": "",
        "required": False,
        "help": "As on the command line: --epochs 90",
    },
}  # fmt: skip

_BEFORE = """# What the page is told; there is nothing to connect to, but the portal wants a port.
export port=$(find_port ${host})
export password="none"
export log_file="${PWD}/train.log"
touch "${log_file}"
"""

# The script's own words are split as a shell would, without running anything in them.
_SCRIPT = """<%%-
  require "shellwords"
  words = Shellwords.split(context.script_arguments.to_s)
-%%>
#!/usr/bin/env bash
# The batch script runs in this job, in its project's folder; its #SBATCH lines were for sbatch.
%(path)s
cd -- <%%= File.expand_path(context.project.to_s.strip).shellescape %%> || exit 1
exec bash ./<%%= context.batch_script.to_s.strip.shellescape %%> <%%= words.shelljoin %%> >>"${log_file}" 2>&1
"""

_VIEW = """<%-
  require "cgi"
  place = log_file.split("/").map { |part| CGI.escape(part).gsub("+", "%20") }.join("/")
-%>
<p>Training on <strong><%= CGI.escapeHTML(host) %></strong>.</p>
<p><a class="btn btn-primary" target="_blank"
  href="/pun/sys/dashboard/files/fs<%= place %>">Show the log</a></p>
<p>A line for each epoch; at its end the job's report: GPU-hours, what they waited for, and a hint.</p>
"""


def train_files(facts: SiteFacts) -> dict[str, str]:
    """Text of each file of the app."""
    return {
        "manifest.yml": manifest_yml(
            "Train (headrace)", "Run a training project on the cluster's GPUs."
        ),
        "form.yml": form_yml(facts, _QUESTIONS),
        "submit.yml.erb": submit_yml(facts, "headrace-train", ["log_file"]),
        "template/before.sh.erb": _BEFORE,
        "template/script.sh.erb": _SCRIPT % {"path": path_sh(facts)},
        "view.html.erb": _VIEW,
    }
