/* Topics, and batches of staged events; see staging.py. */
#include "speed.h"
#include <stddef.h>
#include <structmember.h>

static int
topic_init(Topic *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "prefix", "next_seq", NULL};
    PyObject *name, *prefix;
    long long next_seq = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "US|L", names, &name, &prefix, &next_seq))
        return -1;
    Py_INCREF(name);
    Py_XSETREF(self->name, name);
    Py_INCREF(prefix);
    Py_XSETREF(self->prefix, prefix);
    self->next_seq = next_seq;
    self->batch = -1;
    self->index = 0;
    return 0;
}

static void
topic_dealloc(Topic *self)
{
    Py_XDECREF(self->name);
    Py_XDECREF(self->prefix);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef topic_members[] = {
    {"name", T_OBJECT_EX, offsetof(Topic, name), READONLY, "its name"},
    {"prefix", T_OBJECT_EX, offsetof(Topic, prefix), READONLY, "what a staged record has before the data"},
    {"next_seq", T_LONGLONG, offsetof(Topic, next_seq), 0, "the seq that the next event will have"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject TopicType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "brokerless.core._speed.Topic",
    .tp_basicsize = sizeof(Topic),
    .tp_dealloc = (destructor)topic_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Numbering of one topic, and its place in the batch that is being staged.",
    .tp_members = topic_members,
    .tp_init = (initproc)topic_init,
    .tp_new = PyType_GenericNew,
};

Batch *
batch_new(long long serial, long long first)
{
    Batch *self = PyObject_New(Batch, &BatchType);
    if (self == NULL)
        return NULL;
    self->serial = serial;
    self->first = first;
    self->bytes = self->room = 0;
    self->count = self->capacity = 0;
    self->times = NULL;
    self->index = NULL;
    self->contents = self->keys = NULL;
    self->datas = PyList_New(0);
    self->topics = PyList_New(0);
    self->firsts = PyList_New(0);
    if (self->datas == NULL || self->topics == NULL || self->firsts == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static void
batch_dealloc(Batch *self)
{
    PyMem_Free(self->times);
    PyMem_Free(self->index);
    Py_XDECREF(self->datas);
    Py_XDECREF(self->topics);
    Py_XDECREF(self->firsts);
    Py_XDECREF(self->contents);
    Py_XDECREF(self->keys);
    PyObject_Free(self);
}

/* Room for one more number in each column. */
int
batch_grow(Batch *self)
{
    if (self->count < self->capacity)
        return 0;
    size_t capacity = self->capacity ? self->capacity * 2 : 64;
    int64_t *times = PyMem_Realloc(self->times, capacity * sizeof(int64_t));
    if (times == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->times = times;
    uint16_t *index = PyMem_Realloc(self->index, capacity * sizeof(uint16_t));
    if (index == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->index = index;
    self->capacity = capacity;
    return 0;
}

/* The first event with a content type or key in a batch gives the ones before it their empty ones. */
int
batch_label(Batch *batch)
{
    PyObject *contents = PyList_New((Py_ssize_t)batch->count), *keys = PyList_New((Py_ssize_t)batch->count);
    PyObject *blank = PyUnicode_FromStringAndSize("", 0);
    if (contents == NULL || keys == NULL || blank == NULL) {
        Py_XDECREF(contents);
        Py_XDECREF(keys);
        Py_XDECREF(blank);
        return -1;
    }
    for (size_t i = 0; i < batch->count; i++) {
        Py_INCREF(blank);
        PyList_SET_ITEM(contents, (Py_ssize_t)i, blank);
        Py_INCREF(blank);
        PyList_SET_ITEM(keys, (Py_ssize_t)i, blank);
    }
    Py_DECREF(blank);
    batch->contents = contents;
    batch->keys = keys;
    return 0;
}

static Py_ssize_t
batch_length(Batch *self)
{
    return (Py_ssize_t)self->count;
}

static PyObject *
batch_next(Batch *self, void *closure)
{
    (void)closure;
    return PyLong_FromLongLong(self->first + (long long)self->count);
}

static PyObject *
batch_topics(Batch *self, PyObject *ignored)
{
    (void)ignored;
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(self->topics); i++) {
        Topic *topic = (Topic *)PyList_GET_ITEM(self->topics, i);
        if (PyDict_SetItem(found, topic->name, PyList_GET_ITEM(self->firsts, i)) < 0)
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *
batch_single(Batch *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "single(source, epoch)");
        return NULL;
    }
    PyObject *raw = single_frame(self, args[0], number(args[1]));
    if (raw == NULL)
        Py_RETURN_NONE;
    return raw;
}

static PyObject *
batch_table(Batch *self, PyObject *ignored)
{
    (void)ignored;
    Py_ssize_t topics = PyList_GET_SIZE(self->topics);
    PyObject *table = PyList_New(topics);
    for (Py_ssize_t i = 0; table != NULL && i < topics; i++) {
        Topic *topic = (Topic *)PyList_GET_ITEM(self->topics, i);
        PyObject *first = PyList_GET_ITEM(self->firsts, i);
        long long count = topic->next_seq - PyLong_AsLongLong(first);
        PyObject *entry = Py_BuildValue("(OOL)", topic->name, first, count);
        if (entry == NULL)
            Py_CLEAR(table);
        else
            PyList_SET_ITEM(table, i, entry);
    }
    return table;
}

static PyObject *
batch_columns(Batch *self, PyObject *ignored)
{
    PyObject *table = batch_table(self, ignored), *index = NULL, *times = NULL;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "columns are stored as they lie in memory, which must be little-endian"
#endif
    if (table != NULL) {
        size_t n = PyList_GET_SIZE(table) > 1 ? self->count : 0;
        index = PyBytes_FromStringAndSize((const char *)self->index, (Py_ssize_t)(n * sizeof(uint16_t)));
        times = PyBytes_FromStringAndSize((const char *)self->times, (Py_ssize_t)(self->count * sizeof(int64_t)));
    }
    PyObject *result = NULL;
    if (index != NULL && times != NULL)
        result = PyTuple_Pack(6, table, index, times, self->datas, self->contents ? self->contents : Py_None,
                              self->keys ? self->keys : Py_None);
    Py_XDECREF(table);
    Py_XDECREF(index);
    Py_XDECREF(times);
    return result;
}

static PyMemberDef batch_members[] = {
    {"first", T_LONGLONG, offsetof(Batch, first), READONLY, "offset of the first event"},
    {"bytes", T_LONGLONG, offsetof(Batch, bytes), READONLY, "size, as it counts against the bounds"},
    {"room", T_LONGLONG, offsetof(Batch, room), 0, "what `bytes` may reach"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef batch_getset[] = {
    {"next", (getter)batch_next, NULL, "offset after the last event", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef batch_methods[] = {
    {"columns", (PyCFunction)batch_columns, METH_NOARGS, "Topic table, index, times, data, content types, keys."},
    {"single", (PyCFunction)(void (*)(void))batch_single, METH_FASTCALL,
     "single(source, epoch)\n--\n\nThe frame of a batch of one event without labels; None for any other."},
    {"table", (PyCFunction)batch_table, METH_NOARGS, "Each topic with its first seq and count."},
    {"topics", (PyCFunction)batch_topics, METH_NOARGS, "The first seq of each topic."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods batch_sequence = {.sq_length = (lenfunc)batch_length};

PyTypeObject BatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "brokerless.core._speed.Batch",
    .tp_basicsize = sizeof(Batch),
    .tp_dealloc = (destructor)batch_dealloc,
    .tp_as_sequence = &batch_sequence,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Events that will be one frame.",
    .tp_methods = batch_methods,
    .tp_members = batch_members,
    .tp_getset = batch_getset,
};
