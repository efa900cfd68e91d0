from .rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
