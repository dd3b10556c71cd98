"""Pages: what reports, dashboards and notebook cards are drawn with. One look, and no address in it.

* text: numbers as people read them; names that come from anywhere, safe to stand in HTML
* style: the look, in light, dark and on paper
* charts, plots: SVG pictures, each with its table behind it
* document: the page around them
* card: a small box for notebooks
"""
