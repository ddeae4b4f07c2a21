"""Draft trees as sets of paths, and the search that finds them."""

import heapq

from dflash_hf.decoding.trees import grow_tree


def paths_of(tree, row=0):
    """The tree as a set of paths of tokens."""
    paths = [()]
    for token, parent in list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return set(paths[1:])


def best_first(likely, nodes, depth):
    """
    DDTree's heap: the likeliest paths of at most `depth` tokens.

    Args:
        likely (`callable`): Of a path: the tokens that may follow, likeliest first, with their log-probabilities. Sums
            are taken of these as they are clamped in trees.
        nodes (`int`): Paths to find.
        depth (`int`): Tokens of a path.
    """

    def following(path):
        return [(token, min(max(log_prob, -20.0), -1e-3)) for token, log_prob in likely(path)]

    first = following(())
    heap = [(-first[0][1], (), 0)]
    chosen = set()
    while heap and len(chosen) < nodes:
        cost, prefix, rank = heapq.heappop(heap)
        siblings = following(prefix)
        path = (*prefix, siblings[rank][0])
        chosen.add(path)
        if rank + 1 < len(siblings):
            heapq.heappush(heap, (cost + siblings[rank][1] - siblings[rank + 1][1], prefix, rank + 1))
        if len(path) < depth:
            heapq.heappush(heap, (cost - following(path)[0][1], path, 0))
    return chosen


def tree_of(anchors, ids, log_probs, nodes):
    """A tree whose slots do not depend on each other, from the likely tokens `[R, D, k]` of each."""

    def extend(slot, parents):
        width = 1 if parents is None else parents.shape[1]
        return tuple(tensor[:, slot, None].expand(-1, width, -1) for tensor in (ids, log_probs))

    return grow_tree(anchors, extend, ids.shape[1], nodes, nodes)
