"""Models as functions of weights: configs, weight pytrees, forwards; knows nothing of the engine."""
