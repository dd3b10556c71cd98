"""Pages: what reports, dashboards and notebook cards are drawn with. One look, and no address in it.

* html: the page, its style in light, dark and on paper, safe text, cards for notebooks
* charts: SVG pictures, each with its table behind it
"""
