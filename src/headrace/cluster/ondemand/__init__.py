"""Open OnDemand: apps for a site's portal, generated from its cluster: a training job, and Jupyter.

* form: what the user is asked, the same first questions in both apps
* train, jupyter: each app's files
"""

from headrace.cluster.ondemand.apps import ondemand_files

__all__ = ["ondemand_files"]
