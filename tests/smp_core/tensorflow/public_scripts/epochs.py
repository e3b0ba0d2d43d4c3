"""Epochs over a data set, metrics on merged predictions, two partitions by hand: a script as written for SMP."""

import numpy as np
import smdistributed.modelparallel.tensorflow as smp
import tensorflow as tf

tf.random.set_seed(1234)
smp.init()

random = np.random.RandomState(1)
x_train = random.uniform(0, 255, (96, 12, 12)).astype("float32") / 255.0
y_train = (x_train[:, :6].mean(axis=(1, 2)) > x_train[:, 6:].mean(axis=(1, 2))).astype("int64")
x_train = x_train[..., tf.newaxis]

train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .shuffle(96, seed=smp.dp_rank())
    .batch(32, drop_remainder=True)
)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super(MyModel, self).__init__()  # noqa: UP008
        initializer = tf.keras.initializers.GlorotNormal(seed=192)
        self.conv1 = tf.keras.layers.Conv2D(4, 3, activation="relu", kernel_initializer=initializer)
        self.flatten = tf.keras.layers.Flatten()
        self.d1 = tf.keras.layers.Dense(16, activation="relu", kernel_initializer=initializer)
        self.d2 = tf.keras.layers.Dense(2, kernel_initializer=initializer)

    def call(self, x):
        with smp.partition(0):
            x = self.conv1(x)
            x = self.flatten(x)
        with smp.partition(1):
            x = self.d1(x)
            return self.d2(x)


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@smp.step
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = loss_object(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss, predictions


@tf.function
def train_step(images, labels):
    gradients, loss, predictions = get_grads(images, labels)
    gradients = [g.accumulate() for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    train_accuracy.update_state(labels, predictions.merge())
    return loss.reduce_mean()


for epoch in range(6):
    train_accuracy.reset_states()
    for images, labels in train_ds:
        loss = train_step(images, labels)
    print("epoch", epoch, "loss", loss.numpy(), "accuracy", train_accuracy.result().numpy())
