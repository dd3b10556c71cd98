"""What if: how long a job's steps would take, and how long they would wait, on other machines.

* storage: what a read costs, by presets, measured curves, or as it was recorded
* model: a job's figures, the simulation of a scenario, its spread, and the model's own error on the record
"""
