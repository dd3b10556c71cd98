"""Order: which sample comes when, who takes it, and where a run stands.

* permutation: keyed permutations of [0, n)
* order: what every order is; `shuffled`, `sequential`, `blocked`, `balanced`, `weighted`, `opportunistic`:
  the kinds
* slices: ranks and steps
* state: stop and resume
* hash: keys, and the order hash that proves what was delivered
* randomness: how random an order is
"""

from headrace.order.balanced import Balanced
from headrace.order.blocked import Blocked
from headrace.order.hash import combine_hashes, order_hash, reference_order_hash
from headrace.order.opportunistic import Opportunistic
from headrace.order.order import Order
from headrace.order.permutation import Permutation, ReferencePermutation
from headrace.order.randomness import Randomness
from headrace.order.sequential import Sequential
from headrace.order.shuffled import Shuffled
from headrace.order.slices import Share, Slices, Tail
from headrace.order.state import OrderState
from headrace.order.weighted import Weighted

__all__ = [
    "Balanced",
    "Blocked",
    "Opportunistic",
    "Order",
    "OrderState",
    "Permutation",
    "Randomness",
    "ReferencePermutation",
    "Sequential",
    "Share",
    "Shuffled",
    "Slices",
    "Tail",
    "Weighted",
    "combine_hashes",
    "order_hash",
    "reference_order_hash",
]
