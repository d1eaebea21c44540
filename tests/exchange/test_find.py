"""Which exchange a group gets, and why."""

import autotp.exchange as exchange
from autotp.exchange import Exchange, find_exchange
from autotp.groups import resolve_group


class Failing:
    """What copies on rank 0, and can't be made on rank 1."""

    def __init__(self, group):
        if group.tp_rank == 1:
            raise OSError("no such library")


def check_found(group):
    tp = resolve_group(group)
    found = find_exchange(tp)
    assert type(found) is Exchange and found.why_not == "rows move by collectives on cpu" and find_exchange(tp) is found
    tp.owned.clear()
    real = exchange.CopyExchange, exchange.why_not_copy
    try:
        exchange.CopyExchange, exchange.why_not_copy = Failing, lambda group: ""
        found = find_exchange(tp)
    finally:
        exchange.CopyExchange, exchange.why_not_copy = real
    assert type(found) is Exchange
    assert found.why_not == "TP rank 1 could not prepare copies: OSError: no such library"


def test_all_ranks_get_the_same_exchange(ranks):
    ranks.run(check_found)
