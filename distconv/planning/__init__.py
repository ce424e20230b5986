"""Choose a grid before ranks are started: machine models, predicted steps, and the search."""

from distconv.planning.calibration import calibrate as calibrate
from distconv.planning.layer_layouts import LayoutPlan as LayoutPlan
from distconv.planning.layer_layouts import plan_layouts as plan_layouts
from distconv.planning.machine import Machine as Machine
from distconv.planning.prediction import Prediction as Prediction
from distconv.planning.prediction import predict as predict
from distconv.planning.search import GridPlan as GridPlan
from distconv.planning.search import plan as plan
