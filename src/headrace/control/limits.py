"""stub"""
from dataclasses import dataclass
from headrace.control.history import Knobs
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    reads_in_flight: tuple[int,int] = (1, 1024)
    buffer_bytes: tuple[int,int] = (1<<20, 512<<20)
    decode_threads: tuple[int,int] = (1, 8)
    def clamped(self, k):
        def f(v,b): return v if not v else max(b[0],min(b[1],v))
        return Knobs(f(k.reads_in_flight,self.reads_in_flight),f(k.buffer_bytes,self.buffer_bytes),f(k.decode_threads,self.decode_threads))
