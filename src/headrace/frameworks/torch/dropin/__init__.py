"""How `headrace.torch.DataLoader` speeds torch's loader up without changing what it does.

* iterators: torch's two iterators, which count what they deliver and can go on from a state
* context, worker, messages: our ends on torch's queues
* arena, packing, collating: batches in recycled shared memory
* watching, samplers: what the read-ahead is told of coming samples
* progress, randomness: where an epoch stands, exactly
"""
