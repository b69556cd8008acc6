"""The ASGI application: its routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from vfsd.web import actions, api, exchange, pages, problems
from vfsd.web.access import Access, Credentials
from vfsd.web.events import Events
from vfsd.web.forms import Outcomes
from vfsd.web.sources import Sources


def application(sources: Sources, credentials: Credentials, port: int) -> ASGIApp:
    """Return the application for a server that listens at the loopback port `port`."""
    routes: list[BaseRoute] = [
        Route("/", pages.home),
        Route("/events", Events().answer),
        Route("/w/{key}/", pages.show_timeline),
        Route("/w/{key}/tree", pages.show_tree),
        Route("/w/{key}/file", pages.show_file),
        Route("/w/{key}/changes", pages.show_changes),
        Route("/w/{key}/compare", pages.show_comparison),
        Route("/w/{key}/done", actions.show_done),
        Route("/w/{key}/snapshot", actions.take_snapshot, methods=["POST"]),
        Route("/api/openapi.json", api.openapi),
        Route("/api/filesystem/meta", api.meta),
        Route("/api/filesystem/tree", api.tree),
        Route("/api/filesystem/file", api.file),
        Route("/api/filesystem/archive", api.archive),
        Mount("/static", StaticFiles(packages=[("vfsd.web", "static")])),
    ]
    for name, ask, act in (
        ("restore", actions.confirm_restore, actions.restore),
        ("drop", actions.confirm_drop, actions.drop),
        ("fork", actions.ask_fork, actions.fork),
        ("merge", exchange.confirm_merge, exchange.merge),
        ("adopt", exchange.confirm_adopt, exchange.adopt),
        ("apply", exchange.confirm_apply, exchange.apply),
        ("discard", exchange.confirm_discard, exchange.discard),
    ):
        routes += [Route(f"/w/{{key}}/{name}", ask), Route(f"/w/{{key}}/{name}", act, methods=["POST"])]
    handlers = dict.fromkeys((HTTPException, OSError, ValueError, Exception), problems.answer)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.sources, app.state.credentials, app.state.outcomes = sources, credentials, Outcomes()
    return Access(app, credentials, port)
