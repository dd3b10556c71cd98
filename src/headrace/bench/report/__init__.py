"""Reports: what a finished run's folder says, as a page, against another one's, and as a trace.

* result: a run's files, read back
* repeats: several runs of the same
* measures: the figures that have a name in tables and conditions
* conditions: `au < -2%`
* compare: two results beside each other
* steps, trace: when each step was, and the slowest of them for trace viewers
* page, sections: one HTML file, drawn with `headrace.pages`

Reads DLIO's own results, too: what only headrace writes is left out then.
"""
