"""Order: which sample comes when, who takes it, and where a run stands.

* order: what every order is; `shuffled` (also sequential, blocked, opportunistic and subset), `weighted`
  (also balanced) and `mixed`: the kinds
* windows: rows of tokens, cut or packed of documents (imported by those who read tokens)
* slices: ranks and steps
* state: stop and resume
* hash: keys, keyed permutations, and the order hash that proves what was delivered
* randomness: how random an order is; label_mix: how far its batches are from the set's mix of labels
"""

from headrace._native import Permutation
from headrace.order.hash import combine_hashes, order_hash
from headrace.order.label_mix import LabelMix
from headrace.order.mixed import Mixed
from headrace.order.order import Order
from headrace.order.randomness import Randomness
from headrace.order.shuffled import Blocked, Opportunistic, Sequential, Shuffled, Subset
from headrace.order.slices import Share, Slices, Tail
from headrace.order.state import OrderState
from headrace.order.weighted import Balanced, Weighted

__all__ = [
    "Balanced",
    "Blocked",
    "LabelMix",
    "Mixed",
    "Opportunistic",
    "Order",
    "OrderState",
    "Permutation",
    "Randomness",
    "Sequential",
    "Share",
    "Shuffled",
    "Slices",
    "Subset",
    "Tail",
    "Weighted",
    "combine_hashes",
    "order_hash",
]
