/* Staging: number an event, keep it where it outlives the process, remember it for the frame. See staging.py. */
#include "speed.h"
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* What an event costs beside its data; staging.EVENT_OVERHEAD_BYTES. */
#define EVENT_OVERHEAD 24
/* Layout of the mapped head; see head_file.py. */
#define HEADER_BYTES 4096
#define WORD_STAGED_END 4
#define WORD_STAGED_BASE 5
#define RECORD_BYTES 16
/* What may be kept; see staging.py. */
#define KEPT_FRAMES 1024
#define KEPT_BYTES (256 * 1024)

static int
stage_init(Stage *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"receipt", "max_event_bytes", NULL};
    PyObject *receipt;
    long long max_event_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL", names, &receipt, &max_event_bytes))
        return -1;
    Py_INCREF(receipt);
    Py_XSETREF(self->receipt, receipt);
    Py_XSETREF(self->topics, PyDict_New());
    Py_XSETREF(self->batch, batch_new(0, 0));
    Py_XSETREF(self->kept, PyList_New(0));
    if (self->topics == NULL || self->batch == NULL || self->kept == NULL)
        return -1;
    self->keeps = 0;
    self->kept_bytes = 0;
    self->max_event_bytes = max_event_bytes;
    self->epoch = self->serial = 0;
    self->held = 0;
    return 0;
}

static void
stage_unmap(Stage *self)
{
    if (self->mapped) {
        self->mapped = 0;
        PyBuffer_Release(&self->head);
    }
}

static void
stage_dealloc(Stage *self)
{
    stage_unmap(self);
    Py_XDECREF(self->receipt);
    Py_XDECREF(self->topics);
    Py_XDECREF(self->batch);
    Py_XDECREF(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
stage_attach(Stage *self, PyObject *head)
{
    PyObject *map = PyObject_GetAttrString(head, "map");
    if (map == NULL)
        return NULL;
    stage_unmap(self);
    int failed = PyObject_GetBuffer(map, &self->head, PyBUF_WRITABLE);
    Py_DECREF(map);
    if (failed)
        return NULL;
    if (self->head.len <= HEADER_BYTES || ((uintptr_t)self->head.buf & 7)) {
        PyBuffer_Release(&self->head);
        PyErr_SetString(PyExc_ValueError, "this is not a mapped head");
        return NULL;
    }
    self->mapped = 1;
    Py_RETURN_NONE;
}

static PyObject *
stage_detach(Stage *self, PyObject *ignored)
{
    (void)ignored;
    stage_unmap(self);
    Py_RETURN_NONE;
}

/* A plain store that the compiler may not move: a process killed in between must have left the earlier ones. */
static void
set_word(Stage *self, int word, uint64_t value)
{
    __atomic_store_n((uint64_t *)self->head.buf + word, value, __ATOMIC_SEQ_CST);
}

static uint64_t
get_word(Stage *self, int word)
{
    return __atomic_load_n((uint64_t *)self->head.buf + word, __ATOMIC_SEQ_CST);
}

/* Where the next record of the batch begins; nothing is changed. */
static uint64_t
record_start(Stage *self)
{
    if (get_word(self, WORD_STAGED_BASE) != (uint64_t)self->batch->first)
        return HEADER_BYTES;  /* what is there belongs to a batch that has been written */
    uint64_t end = get_word(self, WORD_STAGED_END);
    return end >= HEADER_BYTES && end <= (uint64_t)self->head.len ? end : HEADER_BYTES;
}

/* As HeadFile.keep; the caller has seen that it fits. */
static void
keep(Stage *self, uint64_t start, int64_t time, PyObject *prefix, PyObject *data)
{
    uint64_t base = (uint64_t)self->batch->first;
    size_t prefix_n = (size_t)PyBytes_GET_SIZE(prefix), data_n = (size_t)PyBytes_GET_SIZE(data);
    if (start == HEADER_BYTES) {
        set_word(self, WORD_STAGED_END, HEADER_BYTES);
        set_word(self, WORD_STAGED_BASE, base);
    }
    uint8_t *record = (uint8_t *)self->head.buf + start, *body = record + RECORD_BYTES;
    memcpy(body, PyBytes_AS_STRING(prefix), prefix_n);
    memcpy(body + prefix_n, PyBytes_AS_STRING(data), data_n);
    memcpy(record + 8, &time, 8);
    put_le32(record, (uint32_t)(prefix_n + data_n));
    put_le32(record + 4, crc32_of((uint32_t)(base ^ base >> 32), record + 8, 8 + prefix_n + data_n));
    set_word(self, WORD_STAGED_END, start + RECORD_BYTES + prefix_n + data_n);  /* it counts from here on */
}

/* Put an event into the batch. 1 and a receipt; 0 if the mapped head has no room; -1 and an error. */
static int
stage_enter(Stage *self, Topic *topic, PyObject *prefix, PyObject *data, int64_t time, long long size,
            PyObject **receipt)
{
    Batch *batch = self->batch;
    uint64_t start = 0;
    if (self->mapped) {
        start = record_start(self);
        uint64_t need = RECORD_BYTES + (uint64_t)PyBytes_GET_SIZE(prefix) + (uint64_t)PyBytes_GET_SIZE(data);
        if (need > (uint64_t)self->head.len - start)
            return 0;
    }
    if (batch_grow(batch) < 0)
        return -1;
    PyObject *parts[3];
    parts[0] = PyLong_FromLongLong(self->epoch);
    parts[1] = PyLong_FromLongLong(batch->first + (long long)batch->count);
    parts[2] = PyLong_FromLongLong(topic->next_seq);
    PyObject *made = NULL;
    if (parts[0] && parts[1] && parts[2])
        made = PyObject_Vectorcall(self->receipt, parts, 3, NULL);
    for (int i = 0; i < 3; i++)
        Py_XDECREF(parts[i]);
    if (made == NULL)
        return -1;
    /* The last step that can fail; afterwards only stores. */
    if (PyList_Append(batch->datas, data) < 0) {
        Py_DECREF(made);
        return -1;
    }
    if (self->mapped)
        keep(self, start, time, prefix, data);
    batch->times[batch->count] = time;
    batch->index[batch->count] = (uint16_t)topic->index;
    batch->count++;
    batch->bytes += size;
    topic->next_seq++;
    *receipt = made;
    return 1;
}

static void
drop_last(PyObject *list, Py_ssize_t length)
{
    if (PyList_GET_SIZE(list) > length && PyList_SetSlice(list, length, PyList_GET_SIZE(list), NULL) < 0)
        PyErr_Clear();  /* making a list shorter does not fail */
}

/* The topic's first event in this batch. */
static int
batch_join(Batch *batch, Topic *topic)
{
    Py_ssize_t topics = PyList_GET_SIZE(batch->topics);
    PyObject *first = PyLong_FromLongLong(topic->next_seq);
    int failed = first == NULL || PyList_Append(batch->topics, (PyObject *)topic) < 0 ||
                 PyList_Append(batch->firsts, first) < 0;
    Py_XDECREF(first);
    if (failed) {
        drop_last(batch->topics, topics);
        return -1;
    }
    topic->batch = batch->serial;
    topic->index = (long)topics;
    return 0;
}

/* Undo it: the topic is the last one that joined. */
static void
batch_leave(Batch *batch, Topic *topic)
{
    drop_last(batch->topics, topic->index);
    drop_last(batch->firsts, topic->index);
    topic->batch = -1;
}

int
stage_try(Stage *self, PyObject *name, PyObject *data, int64_t time, PyObject **receipt)
{
    if (!PyUnicode_CheckExact(name) || !PyBytes_CheckExact(data))
        return 0;
    Topic *topic = (Topic *)PyDict_GetItemWithError(self->topics, name);
    if (topic == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Batch *batch = self->batch;
    if (!Py_IS_TYPE((PyObject *)topic, &TopicType) || batch->contents != NULL)
        return 0;
    long long size = PyBytes_GET_SIZE(data);
    if (size > self->max_event_bytes)
        return 0;
    int is_new = topic->batch != batch->serial;
    size += EVENT_OVERHEAD + (is_new ? PyBytes_GET_SIZE(topic->prefix) : 0);
    if (batch->bytes + size > batch->room || (is_new && PyList_GET_SIZE(batch->topics) > UINT16_MAX))
        return 0;
    if (is_new && batch_join(batch, topic) < 0)
        return -1;
    int done = stage_enter(self, topic, topic->prefix, data, time, size, receipt);
    if (done <= 0 && is_new)
        batch_leave(batch, topic);
    return done;
}

PyObject *
stage_keep(Stage *self, PyObject *source)
{
    if (!self->keeps)
        return NULL;
    /* First what the garbage collector watches: making it may run finalizers, and with them other threads. What was
     * staged may be somebody else's matter by then. */
    Batch *following = batch_new(0, 0);
    PyObject *entry = PyTuple_New(4), *raw = NULL, *first = NULL;
    if (following == NULL || entry == NULL)
        goto decline;
    Batch *batch = self->batch;
    if (self->held || PyList_GET_SIZE(self->kept) >= KEPT_FRAMES || self->kept_bytes + batch->bytes > KEPT_BYTES)
        goto decline;
    raw = single_frame(batch, source, self->epoch);
    first = PyLong_FromLongLong(batch->first);
    if (raw == NULL || first == NULL)
        goto decline;
    PyObject *parts[] = {raw, first, ((Topic *)PyList_GET_ITEM(batch->topics, 0))->name,
                         PyList_GET_ITEM(batch->firsts, 0)};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(parts[i]);
        PyTuple_SET_ITEM(entry, i, parts[i]);
    }
    if (PyList_Append(self->kept, entry) < 0)
        goto decline;
    Py_DECREF(first);
    Py_DECREF(entry);
    self->kept_bytes += PyBytes_GET_SIZE(raw);
    following->serial = ++self->serial;
    following->first = batch->first + 1;
    following->room = batch->room;
    Py_SETREF(self->batch, following);
    return raw;
decline:
    PyErr_Clear();
    Py_XDECREF(following);
    Py_XDECREF(entry);
    Py_XDECREF(raw);
    Py_XDECREF(first);
    return NULL;
}

int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

PyDoc_STRVAR(put_doc, "put(topic, data, time)\n--\n\nStage an ordinary event; None if it is not one, or there is no room.");

static PyObject *
stage_put(Stage *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "put(topic, data, time)");
        return NULL;
    }
    int64_t time;
    if (args[2] == Py_None)
        time = now_ns() / 1000;
    else {
        int overflow;
        if (!PyLong_CheckExact(args[2]))
            Py_RETURN_NONE;
        time = PyLong_AsLongLongAndOverflow(args[2], &overflow);
        if (overflow)
            Py_RETURN_NONE;
    }
    PyObject *receipt;
    int done = stage_try(self, args[0], args[1], time, &receipt);
    if (done < 0)
        return NULL;
    if (!done)
        Py_RETURN_NONE;
    return receipt;
}

PyDoc_STRVAR(offer_doc, "offer(topic, data, time)\n--\n\n`put` for who has not taken the token; None, too, if somebody has it.");

static PyObject *
stage_offer(Stage *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (self->held)
        Py_RETURN_NONE;
    return stage_put(self, args, nargs);
}

PyDoc_STRVAR(add_doc,
"add(topic, data, content_type, key, time, prefix)\n--\n\n"
"Stage any event whose room was made; None if the mapped head has none.");

static PyObject *
stage_add(Stage *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 6 || !Py_IS_TYPE(args[0], &TopicType) || !PyBytes_Check(args[1]) || !PyUnicode_Check(args[2]) ||
        !PyUnicode_Check(args[3]) || !PyBytes_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "add(topic, data, content_type, key, time, prefix)");
        return NULL;
    }
    Topic *topic = (Topic *)args[0];
    Batch *batch = self->batch;
    PyObject *content_type = args[2], *key = args[3], *receipt = NULL;
    int64_t time = PyLong_AsLongLong(args[4]);
    if (time == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t labels = PyUnicode_GET_LENGTH(content_type) + PyUnicode_GET_LENGTH(key);
    /* Labels count too (a character has up to 4 bytes), or a batch of them could outgrow a frame. */
    long long size = PyBytes_GET_SIZE(args[1]) + EVENT_OVERHEAD + 4 * (long long)labels;
    int is_new = topic->batch != batch->serial;
    if (is_new) {
        if (PyList_GET_SIZE(batch->topics) > UINT16_MAX) {
            PyErr_SetString(PyExc_OverflowError, "more topics than a frame can hold");
            return NULL;
        }
        if (batch_join(batch, topic) < 0)
            return NULL;
        size += PyBytes_GET_SIZE(topic->prefix);
    }
    if (labels && batch->contents == NULL && batch_label(batch) < 0)
        goto undo;
    if (batch->contents != NULL &&
        (PyList_Append(batch->contents, content_type) < 0 || PyList_Append(batch->keys, key) < 0))
        goto undo;
    int done = stage_enter(self, topic, args[5], args[1], time, size, &receipt);
    if (done > 0)
        return receipt;
    if (!done)
        PyErr_Clear();
undo:;
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (is_new)
        batch_leave(batch, topic);
    if (batch->contents != NULL) {
        drop_last(batch->contents, (Py_ssize_t)batch->count);
        drop_last(batch->keys, (Py_ssize_t)batch->count);
    }
    PyErr_Restore(kind, value, trace);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
stage_begin(Stage *self, PyObject *first)
{
    long long offset = PyLong_AsLongLong(first);
    if (offset == -1 && PyErr_Occurred())
        return NULL;
    return (PyObject *)batch_new(++self->serial, offset);
}

static PyObject *
stage_mend(Stage *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    Py_RETURN_NONE;  /* nothing is ever half done here */
}

static PyObject *
stage_keep_staged(Stage *self, PyObject *source)
{
    PyObject *raw = stage_keep(self, source);
    Py_XDECREF(raw);
    return PyBool_FromLong(raw != NULL);
}

static PyObject *
stage_take(Stage *self, PyObject *ignored)
{
    (void)ignored;
    if (self->held) {
        PyErr_SetNone(PyExc_IndexError);
        return NULL;
    }
    self->held = 1;
    Py_RETURN_NONE;
}

static PyObject *
stage_give(Stage *self, PyObject *ignored)
{
    (void)ignored;
    self->held = 0;
    Py_RETURN_NONE;
}

static PyObject *
stage_get_batch(Stage *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->batch);
    return (PyObject *)self->batch;
}

static int
stage_set_batch(Stage *self, PyObject *value, void *closure)
{
    (void)closure;
    if (value == NULL || !Py_IS_TYPE(value, &BatchType)) {
        PyErr_SetString(PyExc_TypeError, "batch must be a Batch");
        return -1;
    }
    Py_INCREF(value);
    Py_SETREF(self->batch, (Batch *)value);
    return 0;
}

static PyObject *
stage_get_topics(Stage *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->topics);
    return self->topics;
}

static int
stage_set_topics(Stage *self, PyObject *value, void *closure)
{
    (void)closure;
    if (value == NULL || !PyDict_CheckExact(value)) {
        PyErr_SetString(PyExc_TypeError, "topics must be a dict");
        return -1;
    }
    Py_INCREF(value);
    Py_SETREF(self->topics, value);
    return 0;
}

static PyMemberDef stage_members[] = {
    {"kept", T_OBJECT_EX, offsetof(Stage, kept), READONLY, "frames that have not got their place yet"},
    {"kept_bytes", T_LONGLONG, offsetof(Stage, kept_bytes), 0, "its size"},
    {"keeps", T_BOOL, offsetof(Stage, keeps), 0, "whether single events may be kept"},
    {"epoch", T_LONGLONG, offsetof(Stage, epoch), 0, "the epoch of events staged now"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef stage_getset[] = {
    {"batch", (getter)stage_get_batch, (setter)stage_set_batch, "what is staged now", NULL},
    {"topics", (getter)stage_get_topics, (setter)stage_set_topics, "name → Topic of this epoch", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef stage_methods[] = {
    {"put", (PyCFunction)(void (*)(void))stage_put, METH_FASTCALL, put_doc},
    {"offer", (PyCFunction)(void (*)(void))stage_offer, METH_FASTCALL, offer_doc},
    {"add", (PyCFunction)(void (*)(void))stage_add, METH_FASTCALL, add_doc},
    {"keep", (PyCFunction)stage_keep_staged, METH_O, "Keep the only event that is staged; False if it must be flushed."},
    {"begin", (PyCFunction)stage_begin, METH_O, "A fresh batch whose first event will have that offset."},
    {"mend", (PyCFunction)stage_mend, METH_NOARGS, "After an error or an interrupt: leave only what was accepted."},
    {"attach", (PyCFunction)stage_attach, METH_O, "Keep every event in this mapped head, too."},
    {"detach", (PyCFunction)stage_detach, METH_NOARGS, "Let go of the mapped head."},
    {"take", (PyCFunction)stage_take, METH_NOARGS, "Take the token; IndexError if somebody has it."},
    {"give", (PyCFunction)stage_give, METH_O, "Give the token back."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject StageType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "brokerless.core._speed.Stage",
    .tp_basicsize = sizeof(Stage),
    .tp_dealloc = (destructor)stage_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "What a journal has accepted and nobody can read yet; see staging.py.",
    .tp_methods = stage_methods,
    .tp_members = stage_members,
    .tp_getset = stage_getset,
    .tp_init = (initproc)stage_init,
    .tp_new = PyType_GenericNew,
};
