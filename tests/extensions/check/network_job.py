"""Measure the network between ranks, which lie on the nodes named by the arguments. Rank 0 prints
the links as JSON."""

import json
import sys

from llama_ft import runtime
from llama_ft.extensions.check.network import measure_network

with runtime.start("cpu", "world") as ranks:
    links = measure_network(ranks, sys.argv[1:], 2**20)
    if ranks.is_main:
        print(json.dumps(links))
