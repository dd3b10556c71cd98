"""How `headrace.torch.DataLoader` speeds torch's loader up without changing what it does.

* iterators: torch's two iterators, which count what they deliver and can go on from a state
* workers, sending: our ends on torch's queues, and what runs in a worker process
* shared_batches: batches in recycled shared memory
* pictures: `decode="native"` over torchvision's data sets; transforms, augmentations: what it takes over
* watching: what the read-ahead is told of coming samples, and what fetching costs
* progress, position: where an epoch stands, exactly
"""
