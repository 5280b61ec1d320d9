"""Run by test_multiprocess.py in each of two processes: what they tell each other, as one line of JSON."""

import json
import sys

import jax
import numpy as np

from nca_jax import processes
from nca_jax.errors import UserError
from nca_jax.sharding import make_mesh, named

processes.join()
index = jax.process_index()
made = []


def make(item: int):
    made.append(item)
    if item < 0 and index == 1:
        raise UserError("a negative item")
    return tuple(range(item)), (item,) * 2


def refused(action) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def refuse():
    raise UserError("not like this")


found = {"shared": processes.shared_out(make, [3, 1, 0, 2, 4]), "made": list(made)}
found["one item"] = processes.shared_out(make, [5])
found["refused share"] = refused(lambda: processes.shared_out(make, [1, -1, 2]))
found["of first"] = int(processes.of_first(np.int32(index + 7)))
found["refused in first"] = refused(lambda: processes.in_first(refuse))
found["fine in first"] = refused(lambda: processes.in_first(lambda: made.clear()))
mesh = make_mesh({"data": 1, "fsdp": 4, "tensor": 2})
rows = np.arange(32).reshape(8, 4)
placed = processes.place({"rows": rows}, {"rows": named(mesh, "batch", None)})["rows"]
found["held"] = sorted({int(shard.data[0, 0]) for shard in placed.addressable_shards})
found["whole"] = bool((processes.whole(placed) == rows).all())
processes.wait_for_all("the end")
print(json.dumps(found), file=sys.stdout)
