"""Lightning modules and their data, unmodified: the task and the data of `recipe=lightning`."""

from dpframe.lightning.data import LightningData as LightningData
from dpframe.lightning.task import Lightning as Lightning
