"""What if: how long a job's steps would take, and how long they would wait, on other machines.

* figures: a job as the model needs it
* storage: what a read costs, by presets, measured curves, or as it was recorded
* pipeline: the simulation: storage, readers, processors, training processes
* predict: one scenario, with its spread and the model's own error on the record
"""

from headrace.insight.whatif.figures import JobFigures, Scenario
from headrace.insight.whatif.predict import Prediction, check_of, predict
from headrace.insight.whatif.storage import (
    STORAGES,
    Storage,
    recorded_storage,
    slower,
    storage_of,
)

__all__ = [
    "STORAGES",
    "JobFigures",
    "Prediction",
    "Scenario",
    "Storage",
    "check_of",
    "predict",
    "recorded_storage",
    "slower",
    "storage_of",
]
