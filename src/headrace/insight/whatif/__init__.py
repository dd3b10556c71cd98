"""What if: how long a job's steps would take, and how long they would wait, on other machines.

* jobs: a job as the model needs it
* storage: what a read costs, by presets, measured curves, or as it was recorded
* model: the simulation of one scenario, with its spread and the model's own error on the record
"""
