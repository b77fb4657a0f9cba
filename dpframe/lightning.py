"""Lightning modules and their data, unmodified: the task and the data of `recipe=lightning`."""

from dpframe.plugins.lightning.data import LightningData as LightningData
from dpframe.plugins.lightning.task import Lightning as Lightning
