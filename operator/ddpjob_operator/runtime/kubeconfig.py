"""Kubeconfig files, read as kubectl reads them where the official client's loader differs from it.

Of several files the first that names a current context decides; a context that is asked for needs no current one, nor
one that is there; a login plugin that fails is an error, and not an anonymous user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, kube_config

from ddpjob_operator.runtime.login_plugin import PluginError, credentials

_MOST_NAMES = 10


class _Loader(kube_config.KubeConfigLoader):
    """The client's only logs that a plugin failed, goes on without credentials, and hides what the plugin says."""

    async def load_from_exec_plugin(self) -> bool:
        """Take the token, or else the client certificate, of the user's plugin.

        Raises:
            ConfigException: it gave neither.
        """
        try:
            user = vars(self)["_user"]
            status = await credentials(user["exec"].value, _folder_of(user.path))
        except PluginError as error:
            raise ConfigException(str(error)) from error
        if token := status.get("token"):
            vars(self)["token"] = f"Bearer {token}"
            return True
        for attribute, key in (("cert_file", "clientCertificateData"), ("key_file", "clientKeyData")):
            vars(self)[attribute] = _Data(status, None, data_key_name=key, base64_file_content=False).as_file()
        return True


_Merged: Any = kube_config.KubeConfigMerger
_Data: Any = kube_config.FileOrData
_new_loader: Any = _Loader
"""The client has no types for them."""


async def load(files: str, context: str | None, configuration: Configuration) -> str:
    """Put what a context of the files (a list of paths, as in $PATH) says into the configuration; its namespace.

    Raises:
        ConfigException: they have no such context, or it lacks something. A file that is empty or half written is a
            TypeError, AttributeError, KeyError, ValueError or YAMLError of the client.
    """
    merged = _Merged(files)
    name = context or _current_context(merged)
    names = [str(item.value["name"]) for item in merged.config.value["contexts"]]
    if name not in names:
        has = f"it has {', '.join(sorted(names)[:_MOST_NAMES])}" if names else "it has none"
        raise ConfigException(f"there is no context {name}; {has}")
    loader = _new_loader(config_dict=merged.config, active_context=name, config_base_path=None)
    await loader.load_and_set(configuration)
    return str((loader.current_context["context"] or {}).get("namespace") or "default")


def _folder_of(file: str) -> Path:
    return Path(file).absolute().parent


def _current_context(merged: Any) -> str:
    """The loader takes that of the last file, and `kubectl config use-context` and kubectl the first that has one."""
    for file in merged.config_files.values():
        if name := file.get("current-context"):
            return str(name)
    raise ConfigException("it names no current context; name one with --context, or kubectl config use-context")
