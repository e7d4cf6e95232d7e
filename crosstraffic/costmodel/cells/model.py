"""CellModel: what a fit knows of cells (op, group, size), measured and predicted; part of model.json."""

import pandas as pd
from pydantic import BaseModel, ConfigDict


class CellModel(BaseModel):
    """Everything that ``predict_cells`` needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def predict_cells(model: CellModel, cells: pd.DataFrame) -> pd.DataFrame:
    """Predict cells; ``cells`` has the columns ``results.table.CELL``, the answer the same index.

    Returns:
        Columns ``time_s``, ``low_s``, ``high_s`` (90 % interval of a new measurement), ``source`` (``measured`` where
        the very cell was measured: then ``time_s`` is the median of its repeats exactly; ``model`` elsewhere),
        ``kind`` (``measured``, ``size``, ``range``, ``group``, ``layout``: what had to be extrapolated), ``valid`` and
        ``why`` (None, or what is out of range: a new tier, an op that no curve tells about; then times may be NaN).
    """
    raise NotImplementedError
