/* Datagrams, many per system call: `recvmmsg` into buffers that are made once. See core/runtime/datagrams.py. */
#define _GNU_SOURCE
#include "speed.h"
#include <sys/socket.h>
#include <sys/uio.h>

typedef struct {
    PyObject_HEAD
    struct mmsghdr *headers;
    struct iovec *vectors;
    char *buffer;
    unsigned batch;
} Receiver;

static void
receiver_dealloc(Receiver *self)
{
    PyMem_RawFree(self->headers);
    PyMem_RawFree(self->vectors);
    PyMem_RawFree(self->buffer);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
receiver_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned batch;
    Py_ssize_t slot;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "In", &batch, &slot))
        return NULL;
    if (batch < 1 || batch > 1024 || slot < 1 || slot > 1 << 20) {
        PyErr_SetString(PyExc_ValueError, "batch or slot out of range");
        return NULL;
    }
    Receiver *self = (Receiver *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->batch = batch;
    self->headers = PyMem_RawCalloc(batch, sizeof *self->headers);
    self->vectors = PyMem_RawCalloc(batch, sizeof *self->vectors);
    /* Pages that no datagram touches are never there. */
    self->buffer = PyMem_RawCalloc(batch, (size_t)slot);
    if (self->headers == NULL || self->vectors == NULL || self->buffer == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (unsigned i = 0; i < batch; i++) {
        self->vectors[i].iov_base = self->buffer + i * (size_t)slot;
        self->vectors[i].iov_len = (size_t)slot;
        self->headers[i].msg_hdr.msg_iov = &self->vectors[i];
        self->headers[i].msg_hdr.msg_iovlen = 1;
    }
    return (PyObject *)self;
}

static PyObject *
receiver_read(Receiver *self, PyObject *arg)
{
    int fd = PyObject_AsFileDescriptor(arg);
    if (fd < 0)
        return NULL;
    /* With the interpreter lock held: the call does not block, and a thread that gave the lock up would wait for it. */
    int found = recvmmsg(fd, self->headers, self->batch, MSG_DONTWAIT, NULL);
    PyObject *datagrams = PyList_New(found < 0 ? 0 : found);
    PyObject *cut = PyList_New(0);
    if (datagrams == NULL || cut == NULL)
        goto failed;
    for (int i = 0; i < found; i++) {
        PyObject *datagram = PyBytes_FromStringAndSize(self->vectors[i].iov_base, self->headers[i].msg_len);
        if (datagram == NULL)
            goto failed;
        PyList_SET_ITEM(datagrams, i, datagram);
        if (self->headers[i].msg_hdr.msg_flags & MSG_TRUNC) {
            PyObject *index = PyLong_FromLong(i);
            int result = index == NULL ? -1 : PyList_Append(cut, index);
            Py_XDECREF(index);
            if (result < 0)
                goto failed;
        }
    }
    return Py_BuildValue("(NN)", datagrams, cut);
failed:
    Py_XDECREF(datagrams);
    Py_XDECREF(cut);
    return NULL;
}

static PyMethodDef receiver_methods[] = {
    {"read", (PyCFunction)receiver_read, METH_O, "read(fd): ([datagram], [index of one that was cut short])."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject ReceiverType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "brokerless.core._speed.Receiver",
    .tp_doc = "Receiver(batch, slot): the buffers of recvmmsg.",
    .tp_basicsize = sizeof(Receiver),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = receiver_new,
    .tp_dealloc = (destructor)receiver_dealloc,
    .tp_methods = receiver_methods,
};
