/* The way of one event into a journal, without a lock; see staging.py. */
#include "speed.h"
#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    Stage *stage;
    PyObject *source, *otherwise, *flush, *arm, *send_single;
    PyObject *dict; /* so that it can be documented as the method that it replaces */
    long long due, pause, credit;
    char armed;
    vectorcallfunc call;
} Lane;

/* The event just staged is due: if it is alone, keep it and send it, and leave the rest to whoever has more time. The
 * token is held meanwhile, as nobody may send a later one first. 1 if that was all, 0 if it must be flushed, -1 and an
 * error. */
static int
send_single(Lane *self)
{
    PyObject *raw = stage_keep(self->stage, self->source);
    if (raw == NULL)
        return 0;
    self->stage->held = 1;
    PyObject *result = PyObject_CallOneArg(self->send_single, raw);
    self->stage->held = 0;
    Py_DECREF(raw);
    if (result == NULL)
        return -1;
    Py_DECREF(result);
    int64_t since = now_ns() - self->credit;
    self->due = (self->due > since ? self->due : since) + self->pause;
    return 1;
}

static PyObject *
lane_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Lane *self = (Lane *)callable;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    int64_t now = now_ns();
    PyObject *when, *receipt;
    if (nargs == 2 && !named && !self->stage->held) {
        int done = stage_try(self->stage, args[0], args[1], now / 1000, &receipt);
        if (done < 0)
            return NULL;
        if (done) {
            PyObject *next = now >= self->due ? self->flush : !self->armed ? self->arm : NULL;
            if (next == self->flush && self->send_single != Py_None) {
                int sent = send_single(self);
                if (sent > 0)
                    return receipt;
                if (sent < 0) {
                    Py_DECREF(receipt);
                    return NULL;
                }
            }
            if (next != NULL) {
                when = PyLong_FromLongLong(now);
                PyObject *result = when == NULL ? NULL : PyObject_CallOneArg(next, when);
                Py_XDECREF(when);
                if (result == NULL) {
                    Py_DECREF(receipt);
                    return NULL;
                }
                Py_DECREF(result);
            }
            return receipt;
        }
    }
    when = PyLong_FromLongLong(now);
    PyObject **all = PyMem_Malloc((size_t)(nargs + named + 1) * sizeof(PyObject *));
    if (when == NULL || all == NULL) {
        Py_XDECREF(when);
        PyMem_Free(all);
        return PyErr_NoMemory();
    }
    all[0] = when;
    memcpy(all + 1, args, (size_t)(nargs + named) * sizeof(PyObject *));
    receipt = PyObject_Vectorcall(self->otherwise, all, (size_t)(nargs + 1), kwnames);
    Py_DECREF(when);
    PyMem_Free(all);
    return receipt;
}

static PyObject *
lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stage", "source", "otherwise", "flush", "arm", "send_single", NULL};
    PyObject *stage, *source, *otherwise, *flush, *arm, *send_single;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!UOOOO", names, &StageType, &stage, &source, &otherwise, &flush,
                                     &arm, &send_single))
        return NULL;
    Lane *self = (Lane *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(stage);
    self->stage = (Stage *)stage;
    Py_INCREF(source);
    self->source = source;
    Py_INCREF(send_single);
    self->send_single = send_single;
    Py_INCREF(otherwise);
    self->otherwise = otherwise;
    Py_INCREF(flush);
    self->flush = flush;
    Py_INCREF(arm);
    self->arm = arm;
    self->due = self->pause = self->credit = 0;
    self->armed = 0;
    self->call = lane_call;
    return (PyObject *)self;
}

static int
lane_traverse(Lane *self, visitproc visit, void *arg)
{
    Py_VISIT(self->stage);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->flush);
    Py_VISIT(self->arm);
    Py_VISIT(self->send_single);
    Py_VISIT(self->dict);
    return 0;
}

/* Not the stage: a lane that is being collected may still be called by a finalizer. */
static int
lane_clear(Lane *self)
{
    PyObject **parts[] = {&self->otherwise, &self->flush, &self->arm, &self->send_single};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(Py_None);
        Py_XSETREF(*parts[i], Py_None);
    }
    Py_CLEAR(self->dict);
    return 0;
}

static void
lane_dealloc(Lane *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->stage);
    Py_XDECREF(self->source);
    Py_XDECREF(self->send_single);
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->flush);
    Py_XDECREF(self->arm);
    Py_XDECREF(self->dict);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef lane_members[] = {
    {"pause", T_LONGLONG, offsetof(Lane, pause), 0, "ns by which `due` moves when an event was sent"},
    {"credit", T_LONGLONG, offsetof(Lane, credit), 0, "ns without sending that count"},
    {"due", T_LONGLONG, offsetof(Lane, due), 0, "when to flush, in ns since 1970"},
    {"armed", T_BOOL, offsetof(Lane, armed), 0, "somebody sees to it that what is staged is flushed"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef lane_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "brokerless.core._speed.Lane",
    .tp_basicsize = sizeof(Lane),
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_dictoffset = offsetof(Lane, dict),
    .tp_vectorcall_offset = offsetof(Lane, call),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "The way of one event into a journal; see staging.py.",
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_members = lane_members,
    .tp_getset = lane_getset,
    .tp_new = lane_new,
};
