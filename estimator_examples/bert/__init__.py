"""BERT pre-training with tf.estimator and tfmp's loss scaling."""
