/* What the parts of the module share. */
#ifndef BROKERLESS_SPEED_H
#define BROKERLESS_SPEED_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* As in frame.py. */
#define PREFIX_BYTES 16
#define MAX_FRAME_BYTES (32 * 1024 * 1024)

/* CRC-32 as zlib has it: crc.c. */
void crc32_prepare(void);
uint32_t crc32_of(uint32_t value, const uint8_t *p, size_t n);
PyObject *speed_crc32(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Frames: encode.c, decode.c. */
PyObject *speed_pack_frame(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *speed_total_bytes(PyObject *module, PyObject *datas);
PyObject *speed_check_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *speed_read_events(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *speed_read_single(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Datagrams: receive.c. */
extern PyTypeObject ReceiverType;

/* Staging: batch.c, stage.c, lane.c. */
extern PyTypeObject TopicType, BatchType, StageType, LaneType;

typedef struct {
    PyObject_HEAD
    PyObject *name, *prefix;
    long long next_seq, batch;
    long index;
} Topic;

/* Events that will be one frame. */
typedef struct {
    PyObject_HEAD
    long long serial, first, bytes, room;
    size_t count, capacity;
    int64_t *times;
    uint16_t *index;
    PyObject *datas;           /* list of bytes */
    PyObject *topics;          /* list of Topic, in the order of their first event here */
    PyObject *firsts;          /* list of int: the first seq of each */
    PyObject *contents, *keys; /* lists of str, or NULL as long as all are empty */
} Batch;

typedef struct {
    PyObject_HEAD
    PyObject *receipt; /* the type */
    PyObject *topics;  /* dict of name → Topic */
    Batch *batch;
    long long epoch, max_event_bytes, serial;
    int held;
    char keeps;     /* whether single events may be kept */
    PyObject *kept; /* list of (raw, offset, topic, seq): frames that have not got their place in the journal yet */
    long long kept_bytes;
    int mapped;
    Py_buffer head;
} Stage;

Batch *batch_new(long long serial, long long first);
PyObject *single_frame(Batch *batch, PyObject *source, int64_t epoch); /* encode.c */
int batch_grow(Batch *self);
int batch_label(Batch *self);

/* An ordinary event: 1 and a receipt; 0 if it is not one, or there is no room; -1 and an error. */
int stage_try(Stage *self, PyObject *name, PyObject *data, int64_t time, PyObject **receipt);
/* Keep the frame of the only event of the batch, and begin the next batch; NULL without an error: flush it. */
PyObject *stage_keep(Stage *self, PyObject *source);
int64_t now_ns(void);

/* A number that is not negative, or -1 without an error. */
static inline int64_t
number(PyObject *value)
{
    if (!PyLong_CheckExact(value))
        return -1;
    int overflow;
    long long v = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow || v < 0 ? -1 : v;
}

static inline void
put_le32(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

static inline uint32_t
get_le32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

#endif
