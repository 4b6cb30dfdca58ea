"""Block tables: a row of page numbers for each sequence, on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .attend_call import rounded
from .block_loops import compiled, copy_rows
from .upload import upload


class Table:
    """A table that grows in rows and columns. On the CPU, host and device share memory; elsewhere changes are sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._make(np.zeros((16, 16), dtype=np.int32))

    def _make(self, host: np.ndarray) -> None:
        self.host = host
        self.on_device = torch.from_numpy(host).to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "host": self.host}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.device = state["device"]
        self._make(state["host"])

    def grow(self, rows: int, columns: int) -> None:
        """Grows to at least this many rows and columns."""
        have = self.host.shape
        if rows <= have[0] and columns <= have[1]:
            return
        larger = [max(2 * n, want) if want > n else n for n, want in zip(have, (rows, columns), strict=True)]
        host = np.zeros(larger, dtype=np.int32)
        host[: have[0], : have[1]] = self.host
        self._make(host)

    def set_row(self, row: int, pages: np.ndarray) -> None:
        self.host[row, : len(pages)] = pages
        if self.device.type != "cpu":
            self.on_device[row, : len(pages)] = torch.from_numpy(pages).to(self.device)

    def sent(self, changes: np.ndarray) -> None:
        """Sends changes of the host's table to the device: rows, columns, pages, and a column that is not used."""
        if self.device.type != "cpu" and len(changes):
            rows, columns, pages = upload(self.device, *changes.T[:3])
            self.on_device[rows.long(), columns.long()] = pages

    def of(self, slots: np.ndarray, on_device: torch.Tensor, columns: int) -> torch.Tensor:
        """A copy of some rows, with `columns` entries or a few more."""
        width = min(self.host.shape[1], max(1, rounded(columns)))
        if self.device.type != "cpu":
            return self.on_device[:, :width].index_select(0, on_device)
        rows = np.empty((len(slots), width), dtype=np.int32)
        compiled(copy_rows)(self.host, slots, rows)
        return torch.from_numpy(rows)

    def copy_into(self, to: torch.Tensor, slots: np.ndarray, on_device: torch.Tensor) -> None:
        """Copies some rows into the first rows of `to`, which has no more columns than the table."""
        to = to[: len(slots)]
        if self.device.type != "cpu":
            torch.index_select(self.on_device[:, : to.shape[1]], 0, on_device, out=to)
        else:
            compiled(copy_rows)(self.host, slots, to.numpy())
