"""Objects: ranges of objects in S3, Google, Azure, on web servers and wherever fsspec reaches."""

from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.failure import Failure
from headrace.io.objects.location import is_url, join, shown
from headrace.io.objects.reading import RemoteObject
from headrace.io.objects.statistics import ObjectStats

__all__ = ["Failure", "ObjectEngine", "ObjectStats", "RemoteObject", "is_url", "join", "shown"]
