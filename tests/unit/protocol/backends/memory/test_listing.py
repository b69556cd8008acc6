"""DirectoryCookies: a scan sees what stays exactly once, whatever is added and removed beside it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.directory_cookies import FIRST_COOKIE, DirectoryCookies


class ListingMachine(RuleBasedStateMachine):
    """One listing that changes under several scans.  Each asks for a few names at a time."""

    @initialize(count=st.integers(0, 80))
    def begin(self, count: int) -> None:
        self.names = {b"%d" % at for at in range(count)}
        self.listing = DirectoryCookies(sorted(self.names))
        self.added = 0
        self.cookies = {name: cookie for cookie, name in self.listing.after(0)}
        # Of each scan: where it is, what it has seen, and what was there all the time since it began.
        self.scans: list[tuple[int, list[bytes], set[bytes]]] = []

    @rule(count=st.integers(1, 40), again=st.booleans())
    def add(self, count: int, again: bool) -> None:
        for at in range(count):
            name = b"%d" % at if again else b"new%d" % self.added
            self.added += 1
            if name not in self.names:
                self.listing.add(name)
                self.names.add(name)

    @rule(first=st.integers(0, 80), count=st.integers(1, 80))
    def remove(self, first: int, count: int) -> None:
        for name in sorted(self.names)[first : first + count]:
            self.listing.remove(name)
            self.names.remove(name)
            self.scans = [(cookie, seen, stayed - {name}) for cookie, seen, stayed in self.scans]

    @rule()
    def start_a_scan(self) -> None:
        self.scans.append((0, [], set(self.names)))

    @rule(which=st.integers(0, 5), count=st.integers(1, 30))
    def go_on(self, which: int, count: int) -> None:
        if not self.scans:
            return
        cookie, seen, stayed = self.scans[which % len(self.scans)]
        for _, (at, name) in zip(range(count), self.listing.after(cookie), strict=False):
            assert at > cookie
            assert name in self.names
            cookie = at
            seen.append(name)
        self.scans[which % len(self.scans)] = (cookie, seen, stayed)

    @invariant()
    def lists_what_is_there_by_cookies_that_stay(self) -> None:
        listed = list(self.listing.after(0))
        assert sorted(name for _, name in listed) == sorted(self.names)
        assert [at for at, _ in listed] == sorted({at for at, _ in listed})
        assert all(at >= FIRST_COOKIE for at, _ in listed)
        assert len(self.listing) == len(self.names)

    def teardown(self) -> None:
        for cookie, seen, stayed in getattr(self, "scans", []):
            everything = seen + [name for _, name in self.listing.after(cookie)]
            assert stayed <= set(everything), "a name that stayed was not seen"
            assert all(everything.count(name) == 1 for name in stayed), "a name that stayed was seen twice"


TestListing = ListingMachine.TestCase


@given(st.sets(st.binary(min_size=1, max_size=3), max_size=60), st.integers(1, 7))
def test_a_scan_may_remove_all_that_it_sees(names: set[bytes], at_once: int) -> None:
    listing = DirectoryCookies(names)
    seen: list[bytes] = []
    cookie = 0
    while batch := [found for _, found in zip(range(at_once), listing.after(cookie), strict=False)]:
        for at, name in batch:
            listing.remove(name)
            seen.append(name)
            cookie = at
    assert sorted(seen) == sorted(names)
    assert len(listing) == 0


def test_a_running_iterator_goes_on_when_gaps_are_closed() -> None:
    listing = DirectoryCookies(b"%03d" % at for at in range(200))
    running = listing.after(0)
    seen = [next(running)[1] for _ in range(150)]
    for name in seen:
        listing.remove(name)
    assert [name for _, name in running] == [b"%03d" % at for at in range(150, 200)]


def test_a_name_added_again_comes_last_and_a_cookie_is_never_given_twice() -> None:
    listing = DirectoryCookies([b"a", b"b"])
    cookies = {cookie for cookie, _ in listing.after(0)}
    listing.remove(b"a")
    listing.add(b"a")
    assert [name for _, name in listing.after(0)] == [b"b", b"a"]
    assert {cookie for cookie, name in listing.after(0) if name == b"a"}.isdisjoint(cookies)
