"""Block tables: a row of page numbers for each sequence, on the host and on the device."""

from __future__ import annotations

import numpy as np
import torch

from .append import upload
from .attending import rounded


class Table:
    """Rows grow in number and length. On the CPU host and device share memory; elsewhere changes are sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._make(np.zeros((16, 16), dtype=np.int32))

    def _make(self, host: np.ndarray) -> None:
        self.host = host
        self.on_device = torch.from_numpy(host).to(self.device)

    def grow(self, rows: int, columns: int) -> None:
        """Makes room for at least this much."""
        have = self.host.shape
        if rows <= have[0] and columns <= have[1]:
            return
        larger = [max(2 * n, want) if want > n else n for n, want in zip(have, (rows, columns), strict=True)]
        host = np.zeros(larger, dtype=np.int32)
        host[: have[0], : have[1]] = self.host
        self._make(host)

    def set(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Entries (rows[i], columns[i]) = pages[i]."""
        self.host[rows, columns] = pages
        if self.device.type != "cpu" and len(pages):
            at = upload(self.device, rows, columns, pages)
            self.on_device[at[0].long(), at[1].long()] = at[2]

    def set_row(self, row: int, pages: np.ndarray) -> None:
        self.set(np.full(len(pages), row), np.arange(len(pages)), pages)

    def of(self, rows: torch.Tensor, columns: int) -> torch.Tensor:
        """A copy of some rows, `columns` entries or a few more."""
        width = min(self.host.shape[1], max(1, rounded(columns)))
        return self.on_device[:, :width].index_select(0, rows)
