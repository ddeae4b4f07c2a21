"""Draft trees as sets of paths, and the search that finds them."""

import heapq


def paths_of(tree, row=0):
    """The tree as a set of paths of tokens."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths = set()
    for node in range(1, len(tokens)):
        path = []
        while node:
            path.append(tokens[node])
            node = parents[node]
        paths.add(tuple(reversed(path)))
    return paths


def best_first(likely, nodes, depth):
    """DDTree's heap; `likely(path)` lists the tokens that may follow with their log-probabilities, likeliest first."""
    first = likely(())
    heap, chosen = [(-first[0][1], (), 0)], set()
    while heap and len(chosen) < nodes:
        cost, prefix, rank = heapq.heappop(heap)
        siblings = likely(prefix)
        path = (*prefix, siblings[rank][0])
        chosen.add(path)
        if rank + 1 < len(siblings):
            heapq.heappush(heap, (cost + siblings[rank][1] - siblings[rank + 1][1], prefix, rank + 1))
        if len(path) < depth:
            heapq.heappush(heap, (cost - likely(path)[0][1], path, 0))
    return chosen
