# SPDX-License-Identifier: Apache-2.0
"""Ray Serve: replicas of engines behind Ray's router, over HTTP and by handle.

    serve run dspark_trt.runtime.serving.ray:app bundle=/models/qwen3 replicas=2

A replica holds one engine a bundle and the application of `create_app` over it. Ray starts, routes, scales
and replaces replicas; `RayEngine` (`ray_client.py`) calls them by handle.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from ray import serve
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from dspark_trt.errors import EngineClosedError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine, RequestGroup
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Completion, FinishReason, Request, TokenEvent
from dspark_trt.runtime.serving.app import create_app
from dspark_trt.runtime.serving.errors import ApiError
from dspark_trt.runtime.serving.ray_policies import PrefixRouter, RecentAcceptance, ScaleByWork
from dspark_trt.runtime.serving.settings import ServerSettings, keys_of_environment

# Relative to where the application is made: replicas run elsewhere.
Folder = Annotated[str, AfterValidator(os.path.abspath)]

_DRAIN_S = 30.0  # what running requests get when a model is unloaded or a replica stops


class RayOptions(BaseModel):
    """Arguments of `app`: `name=value` behind `serve run`, or `args` in a configuration file."""

    model_config = ConfigDict(extra="forbid")

    bundle: Folder | None = Field(default=None, description="The one bundle; or give `bundles`")
    bundles: dict[str, Folder] = Field(
        default={}, description="Folders by the names that clients use"
    )
    models_per_replica: int = Field(
        default=1, ge=1, description="Bundles loaded at the same time"
    )
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1, description="Scale up to so many")
    requests_per_replica: int | None = Field(
        default=None,
        ge=1,
        description="Ongoing requests a replica is meant to have; default: max_batch",
    )
    accepted_length: float | None = Field(default=None, ge=1, description="Tokens a round at which that number was found; replicas are "
        "added when it falls"
    )  # fmt: skip
    upscale_delay_s: float = Field(
        default=30, ge=0, description="How long more are needed before"
    )
    downscale_delay_s: float = Field(default=600, ge=0)
    cpus: float = Field(
        default=1, gt=0, description="Of a replica; whole ones are the engine's threads"
    )
    gpus: float = Field(default=0, ge=0, description="Of a replica")
    max_batch: int = Field(default=8, ge=1)
    prefix_cache_mib: int = Field(default=256, ge=0)
    scheduler: str = "auto"
    backend: str = "onnxruntime"

    @model_validator(mode="after")
    def _has_one_source(self) -> "RayOptions":
        if (self.bundle is None) == (not self.bundles):
            raise ValueError("give either bundle or bundles")
        return self

    @property
    def folders(self) -> dict[str, str]:
        """Bundles by name; the first answers requests that name none."""
        if self.bundle is not None:
            return {Path(self.bundle).resolve().name: self.bundle}
        return self.bundles


def _asgi() -> Starlette:
    """The replica's HTTP application; built where the replica runs."""

    async def to_replica(scope: Scope, receive: Receive, send: Send) -> None:
        await serve.get_replica_context().servable_object.http(scope, receive, send)

    return Starlette(routes=[Mount("/", app=to_replica)])


class EngineReplica:
    """Engines of one replica, loaded when they are first asked for; the default one at once."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, options: dict[str, Any], api_keys: tuple[str, ...] = ()
    ) -> None:
        self._options = RayOptions(**options)
        self._api_keys = api_keys
        self._loaded: set[_Model] = set()
        self._stops = False
        self._find = self._multiplexed()
        await self._model()

    # Requests by handle --------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """The whole answer.

        Raises:
            RequestError: an unknown model, or the engine refuses the request.
            EngineClosedError: the replica stops, and did not finish.
        """
        with await self._submitted(request) as group:
            async for _ in group:
                pass
        done = group.completions[group.request_ids[0]]
        if done.finish_reason is FinishReason.ABORTED:  # callers abort by going away
            raise EngineClosedError("the replica stopped before the request was finished")
        return done

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Tokens as they are committed. Raises like `complete`."""
        with await self._submitted(request) as group:
            async for event in group:
                if event.finish_reason is FinishReason.ABORTED:
                    raise EngineClosedError(
                        "the replica stopped before the request was finished"
                    )
                yield event

    async def status(self) -> dict[str, Any]:
        """See `Engine.status`."""
        call = (await self._model()).engine.call(lambda engine: engine.status())
        return await asyncio.wrap_future(call)

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """OpenAI's endpoints of the model that the header `serve_multiplexed_model_id` names."""
        try:
            model = await self._model()
        except RequestError as error:
            body = ApiError(404, str(error), code="model_not_found", param="model").body()
            await JSONResponse(body, 404)(scope, receive, send)
        else:
            await model.app(scope, receive, send)

    # What Ray asks -------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises if an engine failed: Ray replaces the replica."""
        for model in tuple(self._loaded):
            if model.engine.failure is not None:
                raise model.engine.failure

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Read by `ScaleByWork`: recent accepted length over this replica's engines."""
        lengths = [await model.accepted_length() for model in tuple(self._loaded)]
        known = [length for length in lengths if length is not None]
        return {"accepted_length": sum(known) / len(known)} if known else {}

    async def __del__(self) -> None:
        self._stops = True
        closing = [asyncio.to_thread(model.__del__) for model in tuple(self._loaded)]
        await asyncio.gather(*closing)

    async def _submitted(self, request: Request) -> RequestGroup:
        """The request, taken by an engine."""
        while True:
            model = await self._model()
            try:
                return await model.engine.submit([request])
            except EngineClosedError:
                if not self._gave_way(model):
                    raise

    def _gave_way(self, model: "_Model") -> bool:
        """Whether an engine closed because another model took its place after it was found: it can be
        loaded again.
        """
        is_gone = model not in self._loaded and model.engine.failure is None
        return is_gone and not self._stops

    # Models --------------------------------------------------------------------------------------

    async def _model(self) -> "_Model":
        """The engine that the request under way asks for."""
        folders = self._options.folders
        name = serve.get_multiplexed_model_id() or next(iter(folders))
        if name not in folders:  # before another model makes room for it
            raise RequestError(
                f"the model {name!r} does not exist; there are {', '.join(folders)}"
            )
        model: _Model = await self._find(name)
        return model

    def _multiplexed(self) -> Callable[[str], Any]:
        async def load(name: str) -> _Model:
            engine = await asyncio.to_thread(self._open, self._options.folders[name])
            settings = ServerSettings(model_name=name, api_keys=self._api_keys)
            return _Model(engine, settings, self._loaded)

        count = self._options.models_per_replica
        find: Callable[[str], Any] = serve.multiplexed(load, max_num_models_per_replica=count)
        return find

    def _open(self, folder: str) -> AsyncEngine:
        options = self._options
        limits = EngineOptions(
            max_batch=options.max_batch, prefix_cache_bytes=options.prefix_cache_mib << 20
        )
        threads = BackendOptions(threads=max(int(options.cpus), 1))
        return AsyncEngine(
            Engine.load(
                folder,
                backend=options.backend,
                backend_options=threads,
                options=limits,
                scheduler=options.scheduler,
            )
        )


class _Model:
    """A loaded bundle; Ray calls `__del__` in a thread when another takes its place."""

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, loaded: "set[_Model]"
    ) -> None:
        self.engine = engine
        self.app = create_app(engine, settings)
        self._acceptance = RecentAcceptance()
        self._loaded = loaded
        loaded.add(self)

    async def accepted_length(self) -> float | None:
        """Tokens a round since about the last few calls."""
        totals = await asyncio.wrap_future(
            self.engine.call(
                lambda engine: (
                    int(engine.metrics.lengths.sum()),
                    int(engine.metrics.accepted.sum()),
                )
            )
        )
        return self._acceptance.update(*totals)

    def __del__(self) -> None:
        """Running requests end first; new ones go to the engine that is loaded next."""
        if self in self._loaded:
            self._loaded.discard(self)
            self.engine.close(drain_s=_DRAIN_S)


def app(options: RayOptions) -> serve.Application:
    """The application for `serve run` and configuration files.

    API keys, if any, are taken from DSPARK_API_KEYS (separated by commas) where this is called.
    """
    aimed = options.requests_per_replica or options.max_batch
    settings: dict[str, Any] = {
        "name": "dspark",
        "max_ongoing_requests": 2 * max(aimed, options.max_batch),
        "ray_actor_options": {"num_cpus": options.cpus, "num_gpus": options.gpus},
        "request_router_config": {"request_router_class": PrefixRouter},
        "health_check_period_s": 5,
        "graceful_shutdown_timeout_s": _DRAIN_S + 10,
    }
    if options.max_replicas is None:
        settings["num_replicas"] = options.replicas
    else:
        settings["autoscaling_config"] = {
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": aimed,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
            "policy": {
                "policy_function": ScaleByWork,
                "policy_kwargs": {"accepted_length": options.accepted_length},
            },
        }
    deployment = serve.deployment(**settings)(serve.ingress(_asgi)(EngineReplica))
    return deployment.bind(options.model_dump(), keys_of_environment())
